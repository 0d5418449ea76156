"""Studies and sweeps: grids of runs that can be stopped and go on, their tables and figures."""
