"""What every schedule shares: data plane, weight sync, roles, runtimes, metrics. Names no schedule and no engine."""
