"""From a downloaded archive to a data set that trains fast: import, resize, shard, check."""
