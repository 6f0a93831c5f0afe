"""Under Horovod's name: settings of Spark that matter to jobs with horoclone. Each is a pair for SparkConf.set(*pair).

An elastic job (run_elastic) loses tasks and goes on: Spark should start them again, however often that happens. Which
executors and nodes Spark uses again after failures is a matter of its excludeOnFailure settings (before Spark 3.1:
blacklist).
"""

SPARK_CONF_MAX_INT = "2147483647"
SPARK_CONF_MAX_INT_MINUS_ONE = "2147483646"

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

_EXCLUDE = "spark.excludeOnFailure"

SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

# The others need SPARK_CONF_BLACKLIST_ENABLED. An executor, or a node, of which tasks of a stage have failed:
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE = (f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode", "1")

# The same task again on the executor, or on the node, on which it has failed:
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (
    f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor",
    SPARK_CONF_MAX_INT,
)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (
    f"{_EXCLUDE}.task.maxTaskAttemptsPerNode",
    SPARK_CONF_MAX_INT_MINUS_ONE,
)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerNode", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (f"{_EXCLUDE}.task.maxTaskAttemptsPerNode", "1")

# In the whole application:
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor",
    SPARK_CONF_MAX_INT,
)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_EXCLUDE}.application.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (
    f"{_EXCLUDE}.application.maxFailedExecutorsPerNode",
    SPARK_CONF_MAX_INT,
)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (f"{_EXCLUDE}.application.maxFailedExecutorsPerNode", "1")

SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor": "2",
    f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode": "2",
    f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor": "1",
    f"{_EXCLUDE}.task.maxTaskAttemptsPerNode": "2",
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor": "2",
    f"{_EXCLUDE}.application.maxFailedExecutorsPerNode": "2",
}
