"""Object stores that speak S3. Imports nothing above it; what callers may replace is passed in."""
