"""Reuses the S3 server of the indexing tests."""

from __future__ import annotations

from tests.indexing.conftest import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]
