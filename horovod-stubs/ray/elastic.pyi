from horoclone.ray.elastic import (
    Adapter as Adapter,
    Callback as Callback,
    ChangingDiscovery as ChangingDiscovery,
    ClusterDiscovery as ClusterDiscovery,
    ElasticAdapter as ElasticAdapter,
    ElasticRayExecutor as ElasticRayExecutor,
    ElasticSettings as ElasticSettings,
    InCluster as InCluster,
    RayHostDiscovery as RayHostDiscovery,
    TestDiscovery as TestDiscovery,
)
