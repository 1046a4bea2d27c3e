"""Adapters: small trained parts beside a frozen decoder, one file per kind (definitions §12)."""
