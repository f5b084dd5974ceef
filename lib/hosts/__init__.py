"""Where a command runs: this machine, over SSH, or in an LXC container."""
