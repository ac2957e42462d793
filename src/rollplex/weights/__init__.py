"""One copy of the weights under two tensor-parallel degrees: layout algebra (pure), and what carries it out."""
