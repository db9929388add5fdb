"""Real processes on this machine: nodes, ZooKeeper, signals."""
