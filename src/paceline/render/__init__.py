"""Figures, tables, charts and pages for people: what every room shows goes through here."""
