"""Live swarms: a config laid out for its peers, one run and watched here, a device that joins another."""
