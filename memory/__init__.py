"""What outlives a rollout: the store of results, variants, sessions and trajectories, and what is drawn from it."""
