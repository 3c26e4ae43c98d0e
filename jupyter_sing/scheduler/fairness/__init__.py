"""Fair shares, tiers, quotas and limits."""
