"""Training data between a DataFrame and the ranks: Parquet in a store, written by Spark, read by pyarrow."""
