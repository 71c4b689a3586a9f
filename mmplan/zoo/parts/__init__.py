"""What several factories share; no workload names any of it."""
