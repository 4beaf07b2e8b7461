"""What leaves a process and is checked while it arrives."""
