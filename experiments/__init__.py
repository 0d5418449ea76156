"""What people run: the command line, configs, data, the arena and the papers."""
