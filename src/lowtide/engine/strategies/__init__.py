"""Strategies of the recorder: rule, online, profile and planned."""
