"""Requests through routers."""
