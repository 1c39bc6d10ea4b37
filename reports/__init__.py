"""Figures and the HTML report: reads records, runs nothing."""
