"""Layers that compute what the model does and keep less of it for the backward pass."""
