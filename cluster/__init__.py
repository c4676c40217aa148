"""Everything round the cluster: command line, configs, demo."""
