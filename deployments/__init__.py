"""Ray Serve deployments: router and engine."""
