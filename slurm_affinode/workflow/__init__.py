"""Sequences over several layers that commands share: take in, analyse and render, the nightly run, the doctor.

Between ``cli`` and the rest, see CONTRIBUTING.md.
"""
