"""Many runs: a matrix of models, hosts and configurations, one task a notebook, resumed by what each task depends on."""
