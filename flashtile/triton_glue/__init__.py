"""Where Triton and Gluon are met: imports, compilers, launchers, the interpreter."""
