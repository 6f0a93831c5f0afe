from horoclone.data import *
