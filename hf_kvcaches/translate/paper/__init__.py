"""Components of the paper: the joint SVD, routing over layers, and patched layers."""
