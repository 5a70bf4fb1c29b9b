"""The tiers that a batch comes from, in the order in which they are asked: this host or the rack, then the origin."""
