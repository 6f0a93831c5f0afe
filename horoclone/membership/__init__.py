"""Who is in an elastic job. Standard library only, no native code.

coordinator.py decides, service.py speaks for it on its host, client.py is the side of a worker. failover.py moves the
coordinator to a worker where the launcher has died; peer_discovery.py finds it where there is no launcher.
"""
