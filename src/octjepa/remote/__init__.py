"""Objects in gs:// and s3:// buckets: listed, fetched through a bounded verified cache, written and tried again."""
