"""Joining a job that runs on another machine: tickets, certificates, guests."""
