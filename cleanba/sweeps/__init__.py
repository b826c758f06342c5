"""Many runs: environments x seeds x flags, here or under Slurm."""
