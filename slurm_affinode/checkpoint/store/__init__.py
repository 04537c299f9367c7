"""Stores of images on several tiers: entries, copies, retention, transfer."""
