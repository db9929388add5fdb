"""Tests with real processes on this machine: nodes, ZooKeeper, signals."""
