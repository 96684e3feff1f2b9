"""How values are encoded in files and on wires: low precision, clusters, Huffman codes, gaps between positions."""
