from horoclone.ray.elastic import (
    Callback as Callback,
    ChangingDiscovery as ChangingDiscovery,
    ClusterDiscovery as ClusterDiscovery,
    ElasticAdapter as ElasticAdapter,
    ElasticRayExecutor as ElasticRayExecutor,
    ElasticSettings as ElasticSettings,
    LogQueue as LogQueue,
    RayHostDiscovery as RayHostDiscovery,
    TestDiscovery as TestDiscovery,
)
