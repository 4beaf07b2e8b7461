"""One codec for keys and values in memory, in stores and on the wire."""
