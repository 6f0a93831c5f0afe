"""tf.data's service on ranks of their own: compute_worker runs it, compute_service connects training ranks with it."""
