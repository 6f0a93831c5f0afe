"""Elastic training: the job goes on when ranks are lost or come (docs/elastic.md). No framework is imported here."""
