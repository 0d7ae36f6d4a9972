"""What hetu_fx costs where there is nothing to gain."""
