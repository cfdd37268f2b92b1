"""The nouns every other room shares: frozen, JSON both ways, standard library only."""
