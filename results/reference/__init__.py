"""Numbers that papers published: a file a paper, a number a line, as they were printed."""
