"""What this machine is: limits and measured rates."""
