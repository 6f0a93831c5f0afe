"""tf.data's service on ranks of its own: compute_worker runs it, compute_service connects training ranks to it."""
