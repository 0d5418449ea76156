"""Live swarms: settings of their peers, a swarm of local processes, and a single device that joins."""
