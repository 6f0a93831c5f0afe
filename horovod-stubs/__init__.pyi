from horoclone import *
