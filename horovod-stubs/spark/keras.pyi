from horoclone.spark.keras import *
