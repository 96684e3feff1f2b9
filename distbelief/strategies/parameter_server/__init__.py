"""A parameter server: shards hold the parameters, replicas push gradients to them and fetch from them."""
