"""Experiments: parameters, points, workers, kept results, notebooks, and checks of what is kept."""
