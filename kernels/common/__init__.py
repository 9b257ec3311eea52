"""What every op shares: routes, the choice of an implementation, op registration."""
