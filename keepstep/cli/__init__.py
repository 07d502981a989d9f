"""Keepstep."""
