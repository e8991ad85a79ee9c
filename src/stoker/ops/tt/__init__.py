"""Tensor-train lookups and gradients."""
