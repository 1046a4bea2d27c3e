"""Multi-head latent attention: keys and values of all heads from one narrow vector of each token."""
